"""`headrace learn`: small experiments that show, on a real model, what each part of KV caching is for (docs/learn)."""
