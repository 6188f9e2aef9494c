"""Fail everything once: every call, system call, await and thread of a save or a load, one after the other."""
