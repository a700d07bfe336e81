//! `perfvisor top`: where the vCPUs of a VM, or of all VMs of the host, spend their time, now.
//!
//! | module | story |
//! |---|---|
//! | `collect` | the connection to a VM: samples, counts, exits and the guest's counters, as a [`seen::VmScreen`] |
//! | `host` | the VMs, each with a thread that collects |
//! | `names` | names of the places where samples fell |
//! | [`seen`] | what was seen of the VMs |
//! | [`screen`] | what is shown of it, as text and on a terminal |
//! | [`sheet`] | a table, sorted and searched |
//! | [`ui`] | what the user has chosen to see |

mod args;
mod collect;
mod host;
mod names;
pub mod screen;
pub mod seen;
pub mod sheet;
pub mod ui;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, DisableMouseCapture, EnableMouseCapture, Event, KeyEventKind};
use ratatui::crossterm::execute;

use super::{CommandError, DONE, OutputError, print};
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::vendor;
pub use args::TopArgs;
use host::{Host, News};
use screen::Screen;
use seen::Seen;
use ui::{Act, Ui};

/// How long a key may wait.
const KEY_WAIT: Duration = Duration::from_millis(50);

/// Why nothing is shown, or no more.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// As with any command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// No screen of its own on this terminal.
    #[error("the terminal cannot be used ({0}); try --once")]
    NoScreen(io::Error),
    /// The terminal failed later.
    #[error("the terminal")]
    Terminal(#[source] io::Error),
    /// There was nothing to show before it ended.
    #[error("the VM ended")]
    VmEnded,
}

impl From<OutputError> for TopError {
    fn from(error: OutputError) -> Self {
        Self::Command(error.into())
    }
}

/// Shows.
///
/// # Errors
/// [`TopError`]. The terminal is as it was before.
pub fn top(args: &TopArgs) -> Result<ExitStatus, TopError> {
    let args = &TopArgs {
        event: vendor::by_selector(&args.event).map_err(CommandError::from)?,
        ..args.clone()
    };
    let signals = StopSignals::block().map_err(CommandError::Signals)?;
    let mut host = Host::begin(args)?;
    if args.once || !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        host::panics_are_shown_with_their_vm();
        return once(args, &mut host, &signals);
    }
    let mut terminal = Terminal::enter(!args.no_mouse)?;
    host::panics_are_shown_with_their_vm();
    let ended = watch(&mut terminal.screen, &mut host, args, &signals);
    drop(terminal);
    if ended? == End::VmGone {
        print("the VM ended\n")?;
    }
    Ok(DONE)
}

/// One screen as text, when all VMs have been looked at.
fn once(args: &TopArgs, host: &mut Host, signals: &StopSignals) -> Result<ExitStatus, TopError> {
    while !host.all_seen() {
        if signals.take().is_some() {
            return Ok(DONE);
        }
        if let Some(News::Ended) = host.news(KEY_WAIT)? {
            return Err(TopError::VmEnded);
        }
    }
    let screen = screen_of(args, host);
    print(&screen.text())?;
    let mut status = DONE;
    for vm in &screen.vms {
        match &vm.seen {
            Seen::Failed(why) => log::warn!("{}: {why}", vm.label),
            Seen::Ended => log::warn!("{}: the VM ended", vm.label),
            Seen::Waiting | Seen::Shown(_) => continue,
        }
        status = ExitStatus::CheckFailed;
    }
    Ok(status)
}

fn screen_of(args: &TopArgs, host: &Host) -> Screen {
    Screen {
        event: args.event.clone(),
        frequency_hz: args.frequency,
        all_vms: args.all,
        vms: host.vms(),
    }
}

/// Why the live view ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Asked,
    VmGone,
}

/// The terminal in its own screen; back as it was when dropped, whatever ends the view. A panic restores it
/// too, before its message (ratatui's hook).
struct Terminal {
    screen: DefaultTerminal,
    mouse: bool,
}

impl Terminal {
    fn enter(mouse: bool) -> Result<Self, TopError> {
        let failed = |e| {
            ratatui::restore();
            TopError::NoScreen(e)
        };
        let screen = ratatui::try_init().map_err(failed)?;
        if mouse {
            execute!(io::stdout(), EnableMouseCapture).map_err(failed)?;
        }
        Ok(Self { screen, mouse })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if self.mouse {
            // The terminal may be gone.
            let _ = execute!(io::stdout(), DisableMouseCapture);
        }
        ratatui::restore();
    }
}

fn watch(
    terminal: &mut DefaultTerminal,
    host: &mut Host,
    args: &TopArgs,
    signals: &StopSignals,
) -> Result<End, TopError> {
    let mut ui = Ui::new(args.all);
    let mut screen = screen_of(args, host);
    let mut changed = true;
    loop {
        if std::mem::take(&mut changed) {
            terminal
                .draw(|frame| screen.draw(frame, &mut ui))
                .map_err(TopError::Terminal)?;
        }
        if signals.take().is_some() {
            return Ok(End::Asked);
        }
        let mut news = host.look_for_more();
        let began = Instant::now();
        // All that is there, but no more than there is time for.
        while let Some(came) = host.news(Duration::ZERO)? {
            match came {
                News::Ended => return Ok(End::VmGone),
                News::Changed => news = true,
            }
            if began.elapsed() > KEY_WAIT {
                break;
            }
        }
        if news {
            screen = screen_of(args, host);
            changed = true;
        }
        if event::poll(KEY_WAIT).map_err(TopError::Terminal)? {
            match event::read().map_err(TopError::Terminal)? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match ui.key(key) {
                    Act::Quit => return Ok(End::Asked),
                    Act::Reset => host.forget(),
                    Act::Draw => {}
                },
                Event::Mouse(mouse) => {
                    changed |= ui.mouse(mouse);
                    continue;
                }
                _ => {}
            }
            // A changed size is drawn too.
            changed = true;
        }
    }
}
