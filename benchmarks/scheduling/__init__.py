"""Simulated scheduling of training jobs on the GPUs of a cluster."""
