"""The checks, a module per kind. Each is a law (`deepinfer_conformance.case.Law`) and has a mutant in `mutants`."""
