"""The parts of :mod:`diloco_protocol.telemetry`."""
