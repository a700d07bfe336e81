//! Integration tests with real guests.
