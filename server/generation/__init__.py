"""One request in the making: admitted, resolved, submitted, read, ended."""
