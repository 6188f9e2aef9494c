"""Adapters to other libraries, one module each; each needs its library, which is no dependency of this package.

In: an engine. Out: what the other library asks for. Nothing is imported here. Imports everything below.
"""
