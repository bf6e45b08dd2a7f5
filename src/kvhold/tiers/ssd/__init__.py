"""The SSD tier's file layer: a log of segments in a directory. It carries out core's decisions and makes none.

``format`` and ``footer`` are the bytes, ``files`` how files are touched, ``directory`` opens a log, ``recover`` finds
what is in it, ``executor`` (threads around ``writing`` and ``reading``) carries out I/O, ``verify`` looks at a log from
outside. docs/ssd-format.md is the format.
"""
