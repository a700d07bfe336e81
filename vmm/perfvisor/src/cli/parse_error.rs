//! Condenses clap's errors into one line.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use control_api::nearest::did_you_mean;
use operator::commands::one_line;
use perf_core::error_line;

use super::{CliEarlyExit, subcommand_names};

/// Returns the word of `words` that contains the unknown option `letter`, such as `-smp` for `-s`.
fn whole_word(letter: &str, words: &[OsString]) -> Option<String> {
    let name = letter
        .strip_prefix('-')
        .filter(|name| name.chars().count() == 1)?;
    let is_it = |word: &&str| word.starts_with('-') && !word.starts_with("--") && word.contains(name);
    let mut words = words.iter().filter_map(|word| word.to_str());
    words.find(is_it).map(str::to_owned)
}

/// Condenses clap's multi-line error about arguments of `command` into one line. `words` are the
/// arguments as typed.
pub(super) fn condense_error(
    error: &clap::Error,
    command: &clap::Command,
    path: &str,
    words: &[OsString],
) -> CliEarlyExit {
    let context = |kind| context_text(error, kind);
    let see = format!("see `{path} --help`");
    let line = match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            return CliEarlyExit::Text(error.render().to_string());
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            format!("a command is missing: {}; {see}", subcommand_names(command))
        }
        ErrorKind::MissingSubcommand => {
            let known = context(ContextKind::ValidSubcommand);
            format!("a command is missing: {known}; {see}")
        }
        ErrorKind::UnknownArgument => {
            let unknown = describe_unknown_argument(error, command, words);
            format!("{unknown}; {see}")
        }
        ErrorKind::InvalidSubcommand => {
            let wrong = context(ContextKind::InvalidSubcommand);
            let meant = suggestion(error, ContextKind::SuggestedSubcommand);
            let known = subcommand_names(command);
            format!("unknown command '{wrong}'{meant}; known are {known}; {see}")
        }
        ErrorKind::MissingRequiredArgument => {
            format!("missing argument: {}; {see}", context(ContextKind::InvalidArg))
        }
        ErrorKind::ValueValidation => {
            use std::error::Error;
            let reason = error.source().map(error_line).unwrap_or_default();
            let (value, option) = (
                context(ContextKind::InvalidValue),
                context(ContextKind::InvalidArg),
            );
            format!("invalid value '{value}' for '{option}': {reason}")
        }
        ErrorKind::InvalidValue if !context(ContextKind::ValidValue).is_empty() => {
            format!(
                "invalid value '{}' for '{}'{}; must be one of {}",
                context(ContextKind::InvalidValue),
                context(ContextKind::InvalidArg),
                suggestion(error, ContextKind::SuggestedValue),
                context(ContextKind::ValidValue)
            )
        }
        ErrorKind::ArgumentConflict
            if matches!(error.get(ContextKind::PriorArg), Some(ContextValue::Strings(_))) =>
        {
            format!(
                "the argument '{}' cannot be used with {}",
                context(ContextKind::InvalidArg),
                context(ContextKind::PriorArg)
            )
        }
        _ => first_line(error),
    };
    CliEarlyExit::Error(one_line(&line))
}

/// Returns what `error` states about `kind`, or an empty text.
fn context_text(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(s)) => s.clone(),
        Some(ContextValue::Strings(s)) => s.join(", "),
        _ => String::new(),
    }
}

/// Returns a hint with clap's best suggestion of the kind `kind`, or an empty text.
fn suggestion(error: &clap::Error, kind: ContextKind) -> String {
    match error.get(kind) {
        Some(ContextValue::String(guess)) => format!("; did you mean '{guess}'?"),
        // clap sorts its suggestions by ascending similarity, so take the last one.
        Some(ContextValue::Strings(guesses)) if !guesses.is_empty() => {
            format!("; did you mean '{}'?", guesses[guesses.len() - 1])
        }
        _ => String::new(),
    }
}

/// Describes an argument that `command` does not have, and what may have been meant.
fn describe_unknown_argument(error: &clap::Error, command: &clap::Command, words: &[OsString]) -> String {
    let letter = context_text(error, ContextKind::InvalidArg);
    let typed = whole_word(&letter, words).unwrap_or(letter);
    // clap also suggests options that only share an ending, such as --vsock for --api-sock.
    let meant = match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(guess)) => did_you_mean(&typed, [guess.as_str()]),
        _ => suggestion(error, ContextKind::SuggestedArg),
    };
    let option = if typed.starts_with('-') {
        ""
    } else {
        suggest_option(command.get_name())
    };
    format!("unknown argument '{typed}'{meant}{option}")
}

/// Returns the first line of clap's own message, without its prefix.
fn first_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let first = text.lines().next().unwrap_or_default();
    first
        .strip_prefix("error: ")
        .unwrap_or(first)
        .trim_end()
        .to_owned()
}

/// Returns a hint about how to pass the value that was given as a stray positional argument of
/// `command`.
fn suggest_option(command: &str) -> &'static str {
    match command {
        "run" => "; a kernel is named by --kernel FILE, the VM by --name NAME",
        "report" | "script" | "flamegraph" | "pprof" => "; a recording is named by -i FILE",
        "record" | "stat" | "top" => "; no command is started, -d SECONDS says how long",
        _ => "",
    }
}
