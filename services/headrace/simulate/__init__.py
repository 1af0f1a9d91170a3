"""Replays of request traces through the objects that the running system uses, to compare policies."""
