"""The calls to replay: recorded calls, random shapes, published lists of shapes."""
