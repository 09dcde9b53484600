"""The page at `/`: what the tiers hold and do, live. Static files; the browser does the rest (docs/dashboard.md)."""
