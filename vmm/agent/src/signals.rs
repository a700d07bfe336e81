//! Signals as commands expect them.
#![expect(unsafe_code, reason = "the disposition of signals")]

/// Those that a shell has what it starts in the background ignore, and nohup(1).
const IGNORED: [libc::c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP];

/// Gives these signals their usual meaning. What is ignored stays so in the commands that are started, and
/// Ctrl-C would not end them.
pub fn usual() {
    for signal in IGNORED {
        // SAFETY: SIG_DFL installs no handler, so no code of ours can run in a signal's context.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}
