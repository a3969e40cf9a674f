"""Estimate what a sync will cost, before a machine is paid for."""
