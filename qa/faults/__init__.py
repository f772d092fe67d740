"""Plants one fault at a time, and checks whether the console names it and whether the proposed fix gains."""
