"""Plans of runs on absent devices: the programs are compiled for them, and their memory and work counted.

devices ──► abstract ──► rollouts, updates ──► run ──► measured (counting) ──► fitting ──► tables ──► cli.plan
"""
