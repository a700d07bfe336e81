//! `run --config FILE` and `--dump-config`: the options of `perfvisor run` as a TOML file.
//!
//! The keys of the file become command-line arguments, which clap then parses. An option therefore
//! has one parser, one validation and one error message, and a new option is available in the file
//! without further code. The command line overrides the file.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use control_api::nearest::did_you_mean;
use toml::{Table, Value};

use operator::input;

/// Maximum size of the configuration file, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Options of `run` that cannot be keys of the configuration file.
const NON_KEY_OPTIONS: [&str; 3] = ["config", "dump-config", "help"];

/// Error returned when the configuration file is invalid or cannot be written. Each message is one
/// line.
#[derive(Debug, thiserror::Error)]
pub enum ConfigFileError {
    #[error("--config {}: cannot read the file", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    #[error("--config {}: must be at most 1 MiB", .0.display())]
    TooLarge(PathBuf),
    #[error("--config {}: line {line}: {why}", path.display())]
    Syntax { path: PathBuf, line: usize, why: String },
    #[error("--config {}: unknown key '{key}'{hint}; known are {known}", path.display())]
    Unknown {
        path: PathBuf,
        key: String,
        hint: String,
        known: String,
    },
    #[error("--config {}: {key}: must be {wanted}, not {found}", path.display())]
    Kind {
        path: PathBuf,
        key: String,
        wanted: &'static str,
        found: &'static str,
    },
    #[error("--dump-config: the value of --{0} is not valid UTF-8, which TOML requires")]
    NotText(String),
}

/// Command-line arguments with the options of the file given by `--config`.
#[derive(Debug)]
pub struct ExpandedArgs {
    /// The arguments, including those from the file.
    pub args: Vec<OsString>,
    /// Path of the file, and those of its keys that the command line does not override.
    pub from_file: Option<(PathBuf, Vec<String>)>,
}

/// Inserts the options of the file given by `run --config` into `args`, except those that `args`
/// already contains.
///
/// # Errors
/// Returns [`ConfigFileError`] if the file cannot be read or is invalid.
pub fn expand(command: &Command, args: Vec<OsString>) -> Result<ExpandedArgs, ConfigFileError> {
    let unchanged = |args| ExpandedArgs {
        args,
        from_file: None,
    };
    // Ignore errors here. The complete parser reports them after the expansion.
    let lenient = command.clone().ignore_errors(true);
    let Ok(matches) = lenient.try_get_matches_from(&args) else {
        return Ok(unchanged(args));
    };
    let Some(("run", given)) = matches.subcommand() else {
        return Ok(unchanged(args));
    };
    let Some(path) = given.get_one::<PathBuf>("config").cloned() else {
        return Ok(unchanged(args));
    };
    let run = run_of(command);
    let table = read(&path)?;
    let mut all = args;
    let mut keys = Vec::new();
    for (key, value) in &table {
        let option = options(run).find(|option| option.get_long() == Some(key.as_str()));
        let Some(option) = option else {
            let known: Vec<&str> = options(run).filter_map(Arg::get_long).collect();
            return Err(ConfigFileError::Unknown {
                path,
                key: key.clone(),
                hint: did_you_mean(key, known.iter().copied()),
                known: known.join(", "),
            });
        };
        let added = arguments(&path, key, option, value)?;
        if given.value_source(option.get_id().as_str()) != Some(ValueSource::CommandLine) {
            all.extend(added);
            keys.push(key.clone());
        }
    }
    Ok(ExpandedArgs {
        args: all,
        from_file: Some((path, keys)),
    })
}

fn run_of(command: &Command) -> &Command {
    command.find_subcommand("run").unwrap_or(command)
}

/// Returns the options of `run` that can be keys of the configuration file.
fn options(run: &Command) -> impl Iterator<Item = &Arg> {
    run.get_arguments().filter(|option| {
        !option.is_hide_set()
            && option
                .get_long()
                .is_some_and(|long| !NON_KEY_OPTIONS.contains(&long))
    })
}

fn read(path: &Path) -> Result<Table, ConfigFileError> {
    let failed = |e| ConfigFileError::Read(path.into(), e);
    let mut text = String::new();
    let file = input::open(path).map_err(failed)?;
    file.take(MAX_FILE_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(failed)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(ConfigFileError::TooLarge(path.into()));
    }
    text.parse().map_err(|e: toml::de::Error| {
        let at = e.span().map_or(0, |span| span.start).min(text.len());
        let before = text.as_bytes().get(..at).unwrap_or_default();
        ConfigFileError::Syntax {
            path: path.into(),
            line: before.iter().filter(|&&byte| byte == b'\n').count() + 1,
            why: e.message().to_owned(),
        }
    })
}

/// Converts a key and its value to command-line arguments.
fn arguments(path: &Path, key: &str, option: &Arg, value: &Value) -> Result<Vec<OsString>, ConfigFileError> {
    let wrong = |wanted| ConfigFileError::Kind {
        path: path.into(),
        key: key.into(),
        wanted,
        found: match value {
            Value::String(_) => "a text",
            Value::Integer(_) | Value::Float(_) => "a number",
            Value::Boolean(_) => "true or false",
            Value::Datetime(_) => "a date",
            Value::Array(_) => "an array",
            Value::Table(_) => "a table",
        },
    };
    let one = |value: &Value| -> Option<OsString> {
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(true) => "on".into(),
            Value::Boolean(false) => "off".into(),
            Value::Datetime(_) | Value::Array(_) | Value::Table(_) => return None,
        };
        Some(format!("--{key}={text}").into())
    };
    match (option.get_action(), value) {
        (ArgAction::SetTrue, Value::Boolean(true)) => Ok(vec![format!("--{key}").into()]),
        (ArgAction::SetTrue, Value::Boolean(false)) => Ok(Vec::new()),
        (ArgAction::SetTrue, _) => Err(wrong("true or false")),
        (ArgAction::Append, Value::Array(values)) => values
            .iter()
            .map(|value| one(value).ok_or_else(|| wrong("an array of texts or numbers")))
            .collect(),
        (ArgAction::Append, value) => {
            let only = one(value).ok_or_else(|| wrong("a text, a number, or an array of them"))?;
            Ok(vec![only])
        }
        (_, Value::Boolean(true)) if has_optional_value(option) => Ok(vec![format!("--{key}").into()]),
        (_, Value::Boolean(false)) if has_optional_value(option) => Ok(Vec::new()),
        (_, value) => Ok(vec![one(value).ok_or_else(|| wrong("a text or a number"))?]),
    }
}

/// Returns whether the value of the option is optional, as for `--vsock`. In a file, `true` stands
/// for an omitted value.
fn has_optional_value(option: &Arg) -> bool {
    option.get_num_args().is_some_and(|count| count.min_values() == 0)
}

/// Writes the options of `run` as a configuration file, with the defaults of unused options as
/// comments.
///
/// # Errors
/// Returns [`ConfigFileError::NotText`] if a value cannot be represented in TOML.
pub fn dump(command: &Command, given: &ArgMatches) -> Result<String, ConfigFileError> {
    let mut out = String::new();
    for option in options(run_of(command)) {
        let (Some(key), id) = (option.get_long(), option.get_id().as_str()) else {
            continue;
        };
        let source = given.value_source(id);
        let comment = if source == Some(ValueSource::CommandLine) {
            ""
        } else {
            "# "
        };
        if matches!(option.get_action(), ArgAction::SetTrue) {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "{comment}{key} = {}", given.get_flag(id));
            continue;
        }
        let texts = given
            .get_raw(id)
            .into_iter()
            .flatten()
            .map(|value| value.to_str().map(|text| Value::String(text.to_owned())))
            .collect::<Option<Vec<Value>>>()
            .ok_or_else(|| ConfigFileError::NotText(key.to_owned()))?;
        let value = match (option.get_action(), texts) {
            (_, texts) if texts.is_empty() => continue,
            (ArgAction::Append, texts) => Value::Array(texts),
            // clap reports an omitted value as an empty string.
            (_, texts) if has_optional_value(option) && texts == [Value::String(String::new())] => {
                Value::Boolean(true)
            }
            (_, mut texts) => texts.remove(0),
        };
        let _ = writeln!(out, "{comment}{key} = {value}");
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cli::{self, CliEarlyExit, RunArgs};

    fn run(args: &[&str]) -> Result<RunArgs, CliEarlyExit> {
        match cli::parse(["perfvisor", "run"].iter().chain(args))?.command {
            cli::CliCommand::Run(run) => Ok(*run),
            other => unreachable!("run was asked for, not {other:?}"),
        }
    }

    fn with_file(text: &str, args: &[&str]) -> Result<RunArgs, CliEarlyExit> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.toml");
        fs::write(&path, text).unwrap();
        run(&[&["--config", path.to_str().unwrap()], args].concat())
    }

    fn line(text: &str, args: &[&str]) -> String {
        match with_file(text, args) {
            Err(CliEarlyExit::Error(line)) => {
                assert!(!line.contains('\n') && line.contains("vm.toml"), "{line:?}");
                line
            }
            other => panic!("{text:?} gave {other:?}"),
        }
    }

    #[test]
    fn command_line_overrides_config_file() {
        let text = "kernel = \"k\"\ncpus = 4\nmemory = \"64M\"\nhide-uncounted = false\nprealloc = true\nmux-turn = 0.5\n\
                    cmdline = \"-a b=c\"\nstats = false\n";
        let args = with_file(text, &["--cpus", "2", "--initrd", "i"]).unwrap();
        assert_eq!((args.cpus.present(), args.memory), (2, 64 << 20));
        assert_eq!(args.cmdline.as_deref(), Some("-a b=c"));
        assert!(args.prealloc && !args.hide_uncounted && !args.stats);
        assert_eq!(
            args.initrd.as_deref(),
            Some(Path::new("i")),
            "--kernel is in the file"
        );
        assert_eq!(args.mux_turn.unwrap().as_micros(), 500);
    }

    /// `true` stands for an omitted optional value. Regression test: `vsock = true` was rejected as
    /// the value `on`.
    #[test]
    fn optional_value_is_boolean_in_config_file() {
        let bare = with_file("vsock = true\njail = true\n", &[]).unwrap();
        assert_eq!(bare.vsock.unwrap().cid, 3);
        assert!(bare.jail.is_some());
        let without = with_file("vsock = false\njail = false\n", &[]).unwrap();
        assert!(without.vsock.is_none() && without.jail.is_none());
        assert_eq!(with_file("vsock = \"cid=9\"", &[]).unwrap().vsock.unwrap().cid, 9);
        let Err(CliEarlyExit::Text(text)) = run(&["--vsock", "--jail", "--dump-config"]) else {
            panic!("--dump-config prints");
        };
        let kept = with_file(&text, &[]).unwrap();
        assert!(kept.vsock.is_some() && kept.jail.is_some(), "{text}");
    }

    #[test]
    fn config_file_errors_match_option_errors() {
        for (text, parts) in [
            ("cpus = 0", ["'0'", "between 1 and 64"]),
            ("memory = \"15M\"", ["'15M'", "16M"]),
            ("initrd = \"x\"", ["--kernel", ""]),
            (
                "frobnicate = 1",
                ["unknown key 'frobnicate'", "kernel, boot-protocol, initrd, "],
            ),
            ("cpuz = 1", ["'cpuz'; did you mean 'cpus'?", "known are"]),
            ("config = \"x\"", ["unknown key 'config'", ""]),
            ("cpus = [1]", ["cpus: must be a text or a number", "an array"]),
            (
                "prealloc = \"yes\"",
                ["prealloc: must be true or false", "a text"],
            ),
            ("[cpus]\nmax = 2", ["cpus", "a table"]),
            ("cpus = 1\nmemory = ", ["line 2", ""]),
            ("cpus = 1\ncpus = 2", ["line 2", ""]),
        ] {
            let line = line(text, &[]);
            assert!(parts.iter().all(|part| line.contains(part)), "{text:?}: {line}");
        }
        // Errors on the command line are not attributed to the file.
        let Err(CliEarlyExit::Error(own)) = with_file("memory = \"64M\"", &["--cpus", "0"]) else {
            panic!("0 vCPUs");
        };
        assert!(own.starts_with("invalid value '0' for '--cpus"), "{own}");
        let Err(CliEarlyExit::Error(missing)) = run(&["--config", "/nonexistent/x"]) else {
            panic!("no file");
        };
        assert!(missing.contains("--config /nonexistent/x"), "{missing}");
        let Err(CliEarlyExit::Error(endless)) = run(&["--config", "/dev/zero"]) else {
            panic!("no options");
        };
        assert!(endless.contains("1 MiB"), "{endless}");
    }

    /// A dump that is read back results in the same arguments and the same dump.
    #[test]
    fn config_dump_round_trips() {
        let args = [
            "--kernel",
            "a \"kernel\"",
            "--cmdline",
            "x=\\y 'z'",
            "--cpus",
            "1,max=4",
            "--pmu",
            "intel-v4",
            "--prealloc",
            "--hide-uncounted",
            "off",
            "--memory",
            "64M",
            "--pin",
            "0=1,1=0",
            "--observers",
            "/run/vm.look",
        ];
        let dump = |args: &[&str]| match run(&[args, &["--dump-config"]].concat()) {
            Err(CliEarlyExit::Text(text)) => text,
            other => panic!("{other:?}"),
        };
        let text = dump(&args);
        assert!(
            text.contains("# nested = false") && text.contains("# share = \"guest-first\""),
            "{text}"
        );
        let mut again = with_file(&text, &[]).unwrap();
        again.config = None;
        let given = run(&args).unwrap();
        assert_eq!(format!("{again:?}"), format!("{given:?}"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vm.toml");
        fs::write(&path, &text).unwrap();
        assert_eq!(dump(&["--config", path.to_str().unwrap()]), text);
    }
}
