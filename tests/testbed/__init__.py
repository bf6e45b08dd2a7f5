"""What tests share. They import it as ``testbed.PART.MODULE``; nothing of it is installed with kvhold.

``tests`` is on the path of all tests. A script of its own wants ``PYTHONPATH=tests python -m testbed.PART.MODULE``.
"""
