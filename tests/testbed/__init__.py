"""What tests share. Every module below ``tests`` is imported by its path from there: ``testbed.engine.bed``.

``tests`` is on the path of all tests and of the processes that they start. A module that is also a program wants
``PYTHONPATH=tests python -m testbed.PART.MODULE``. Nothing of this is installed with kvhold.
"""
