"""Routes whose answers are made of vectors: embeddings, scores, rankings."""
