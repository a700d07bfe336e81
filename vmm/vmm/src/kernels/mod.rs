//! Modifications of a guest's Linux kernels, both of the loaded kernel and of kernels that the
//! guest starts itself.
//!
//! | module | |
//! |---|---|
//! | [`uncounted`] | removes uncountable events from the tables of a kernel |
//! | [`running`] | patches a kernel that the guest starts itself (kexec, kdump), in memory |

pub mod running;
pub mod uncounted;
