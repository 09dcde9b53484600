"""`kvtide bench core`: the scheduler's core against SGLang's trees."""
