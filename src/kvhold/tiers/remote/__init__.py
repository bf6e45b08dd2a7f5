"""The remote tier: a store that hosts share, spoken to by a process of its own.

``url`` says which store, ``record`` is what a value looks like, ``stores`` has one module for each kind of store,
``child`` is the process that speaks to it, ``messages`` what it is told, ``executor`` the manager's end of it with the
deadlines, ``breaker`` when the store is of use, ``floors`` what is too old to be believed after a purge.
"""
