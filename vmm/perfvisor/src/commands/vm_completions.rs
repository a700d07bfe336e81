//! Completion of the names of running VMs, added to the scripts that `clap_complete` generates.

use clap::Command;
use clap_complete::Shell;

/// Command that prints the names of the running VMs.
const NAMES: &str = "perfvisor ps --names 2>/dev/null";
/// Identifier of the positional argument that names a VM.
const VM_ARGUMENT: &str = "name";

/// Makes the completion script of `shell` offer the names of running VMs, for shells with known
/// script formats.
pub(super) fn with_vm_names(shell: Shell, script: &str, command: &Command) -> String {
    let commands: Vec<&str> = command
        .get_subcommands()
        .filter(|command| command.get_positionals().any(|arg| arg.get_id() == VM_ARGUMENT))
        .map(Command::get_name)
        .collect();
    match shell {
        Shell::Bash => in_bash(script, &commands),
        Shell::Zsh => in_zsh(script),
        Shell::Fish => in_fish(script, &commands),
        _ => script.to_owned(),
    }
}

/// Makes the bash script complete the names of VMs, both as arguments of `commands` and as values
/// of `--vm`.
fn in_bash(script: &str, commands: &[&str]) -> String {
    let (mut out, mut takes_vm, mut after_option) = (String::new(), false, false);
    for line in script.lines() {
        let text = line.trim();
        if let Some(name) = text
            .strip_prefix("perfvisor__subcmd__")
            .and_then(|rest| rest.strip_suffix(')'))
        {
            takes_vm = commands.contains(&name);
        }
        if takes_vm && text.starts_with("opts=\"") && text.ends_with('"') {
            out += line.strip_suffix('"').unwrap_or(line);
            out += &format!(" $({NAMES})\"\n");
            takes_vm = false;
        } else if after_option && text.starts_with("COMPREPLY=") {
            let indent = &line[..line.len() - text.len()];
            out += &format!("{indent}COMPREPLY=($(compgen -W \"$({NAMES})\" -- \"${{cur}}\"))\n");
        } else {
            out += line;
            out.push('\n');
        }
        after_option = text == "--vm)";
    }
    out
}

/// Makes the zsh script complete the names of VMs, by setting the action of the arguments that name
/// a VM.
fn in_zsh(script: &str) -> String {
    let action = format!(":($({NAMES}))' \\");
    let mut out = String::new();
    for line in script.lines() {
        let argument = line.contains(&format!(":{VM_ARGUMENT} -- Name of the VM")) || line.contains("--vm=[");
        match line.strip_suffix(":' \\").filter(|_| argument) {
            Some(begin) => out += &format!("{begin}{action}\n"),
            None => out += &format!("{line}\n"),
        }
    }
    out
}

/// Makes the fish script complete the names of VMs, by appending a rule for each of `commands`.
fn in_fish(script: &str, commands: &[&str]) -> String {
    let mut out = script.to_owned();
    for command in commands {
        out += &format!(
            "complete -c perfvisor -n \"__fish_perfvisor_using_subcommand {command}\" -f -a \"({NAMES})\"\n"
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use crate::cli::Cli;
    use crate::commands::generate::completions;

    use super::*;

    #[test]
    fn completions_offer_names_of_running_vms() {
        let bash = completions(Shell::Bash, Cli::command());
        let words = |command: &str| {
            let mut lines = bash.lines().skip_while(|line| line.trim() != command).skip(1);
            lines.next().unwrap().contains(NAMES)
        };
        for command in ["stat", "record", "top", "exits", "exec", "ctl"] {
            assert!(words(&format!("perfvisor__subcmd__{command})")), "{command}");
        }
        assert!(!words("perfvisor__subcmd__report)"));
        let zsh = completions(Shell::Zsh, Cli::command());
        // Six commands take a VM name, and `list` and `annotate` take one with `--vm`.
        assert_eq!(zsh.matches(NAMES).count(), 8, "{zsh}");
        assert_eq!(bash.matches(NAMES).count(), 8, "{bash}");
        let fish = completions(Shell::Fish, Cli::command());
        assert!(fish.contains(&format!("using_subcommand stat\" -f -a \"({NAMES})\"")));
    }

    /// Bash parses the modified completion script without a syntax error.
    #[test]
    fn bash_accepts_script() {
        let script = completions(Shell::Bash, Cli::command());
        let checked = std::process::Command::new("bash").args(["-nc", &script]).status();
        assert!(checked.is_ok_and(|status| status.success()));
    }
}
