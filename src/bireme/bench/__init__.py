"""Measurements that a user can repeat: each prints a table for people and one JSON line to keep."""
