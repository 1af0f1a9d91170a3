"""`headrace verify`: that reuse changes nothing, checked on any model without a cluster, and what it saves."""
