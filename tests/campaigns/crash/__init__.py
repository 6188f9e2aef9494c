"""Crash points tried and survived, for this engine and what a user would pick instead."""
