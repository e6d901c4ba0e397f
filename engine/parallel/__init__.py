"""Several ranks that hold one model: who has which part of it, and how their parts add up."""
