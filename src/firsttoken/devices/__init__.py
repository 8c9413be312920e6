"""What an engine must know of a device before it runs there: one small interface, and the devices that have it.

A further vendor's torch backend is one object with the methods of `Device`, given to `registry.register` or named by an
entry point of the group ``firsttoken.devices``; nothing else changes.
"""
