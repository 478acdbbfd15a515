"""The filter in Swift's proxy that answers annotated GETs with features.

It authorises, streams and cancels; the worker computes.  No module of this
package imports torch, pyarrow or numpy, and only ``concurrency`` imports
eventlet.
"""
