"""Plans of runs on absent devices: the programs are compiled for them, and their memory added up.

devices ──► abstract ──► run ──► measured ──► fitting ──► tables ──► cli.plan
"""
