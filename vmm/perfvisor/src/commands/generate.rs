//! `perfvisor generate`: manual pages and shell completions from the command line definition.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

use super::{CommandError, DONE, print};
use crate::exit::ExitStatus;

/// `perfvisor generate`.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct GenerateArgs {
    /// Write the manual pages of all commands to this directory.
    #[arg(long, value_name = "DIR")]
    pub man: Option<PathBuf>,
    /// Print the completions for this shell: bash, zsh or fish, for example.
    #[arg(long, value_name = "SHELL")]
    pub completions: Option<Shell>,
}

/// Writes the pages or completions of `command`.
///
/// # Errors
/// Returns [`CommandError`] if a file cannot be written.
pub fn generate(args: &GenerateArgs, command: clap::Command) -> Result<ExitStatus, CommandError> {
    if let Some(directory) = &args.man {
        std::fs::create_dir_all(directory)
            .and_then(|()| clap_mangen::generate_to(command, directory))
            .map_err(CommandError::file(directory))?;
    } else if let Some(shell) = args.completions {
        print(&completions(shell, command))?;
    }
    Ok(DONE)
}

/// Returns the completion script for `shell`.
pub fn completions(shell: Shell, mut command: clap::Command) -> String {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "perfvisor", &mut text);
    String::from_utf8_lossy(&text).into_owned()
}
