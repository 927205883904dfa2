"""Spans and metrics of requests for an OpenTelemetry collector.

Without `tracing` in the configuration nothing here is loaded.
"""
