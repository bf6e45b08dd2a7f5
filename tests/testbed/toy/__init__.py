"""An engine that is a paged cache and a step loop, without a model."""
