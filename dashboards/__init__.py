"""Dashboards generated from the metric catalogue."""
