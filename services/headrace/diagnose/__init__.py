"""`headrace diagnose`: is it arithmetic, memory or the way between them that limits this model on this machine?"""
