//! What is done with a guest's Linux kernels, whoever loads them: before the guest starts with the one that
//! it is loaded with, and later with those that it starts itself.
//!
//! | module | |
//! |---|---|
//! | [`uncounted`] | takes events that nobody counts here out of a kernel's tables |
//! | [`running`] | sees to a kernel that the guest starts itself (kexec, kdump), in its memory |

pub mod running;
pub mod uncounted;
