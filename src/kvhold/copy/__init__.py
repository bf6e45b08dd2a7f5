"""Copy engines between an engine's paged KV cache and the arena.

An object is one block: the pages of all layers, one after the other in engine order. A copy engine offers
``begin_publish`` and ``begin_restore``; both return a :class:`kvhold.copy.job.Job` and never wait for a device.
"""
