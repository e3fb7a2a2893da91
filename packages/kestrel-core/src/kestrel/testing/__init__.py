"""The test kit: conformance checks and fakes for whoever writes a family or a kernel backend. Import its modules."""
