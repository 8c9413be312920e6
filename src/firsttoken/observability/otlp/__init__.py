"""Traces and metrics by OTLP. A process of its own builds and sends them, with OpenTelemetry's SDK: `export` is the
serving process's end, `process` the other. Only the latter imports OpenTelemetry."""
