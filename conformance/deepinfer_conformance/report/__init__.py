"""The report: plain values with a schema, JUnit, one HTML page, verification and comparison."""
