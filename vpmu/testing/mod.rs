//! Code shared by the tests, the fuzz target and the long run: a reference model, and a stream of
//! operations that is applied to the reference model and to the PMU.

#[allow(
    clippy::needless_range_loop,
    clippy::precedence,
    clippy::manual_is_multiple_of,
    reason = "written for the reader of a manual: conditions as they stand there"
)]
pub mod reference;
pub mod stream;
