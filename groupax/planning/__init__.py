"""What a run will take on devices that are not here: its programs compiled for them, their memory and arithmetic.

devices ──► abstract ──► rollouts, updates ──► run ──► measured (counting) ──► fitting ──► tables ──► command
"""
