"""What a run will take on devices that are not here: its programs compiled for them, their memory and arithmetic.

devices ──► programs ──► counting (arithmetic, traffic) ──► measured ──► fitting ──► tables ──► command
"""
