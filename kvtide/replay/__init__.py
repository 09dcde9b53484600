"""Traces of real requests through the real core, beside the best that any policy could have done."""
