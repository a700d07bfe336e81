//! `perfvisor top`: a live view of where the vCPUs of one VM, or of all VMs of the host, spend
//! their time.
//!
//! | module | contents |
//! |---|---|
//! | `collect` | the connection to a VM: collects samples, counts, exits and guest counters into a [`rows::TopVmData`] |
//! | `host` | the observed VMs, with one collecting thread each |
//! | `names` | symbols of sampled addresses |
//! | [`rows`] | the collected data |
//! | [`screen`] | output as text and on a terminal |
//! | [`sheet`] | a table with sorting and search |
//! | [`ui`] | selections of the user |

mod args;
mod collect;
mod host;
mod names;
pub mod rows;
pub mod screen;
pub mod sheet;
pub mod ui;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, DisableMouseCapture, EnableMouseCapture, Event, KeyEventKind};
use ratatui::crossterm::execute;

use super::{CommandOutputError, DONE, OperatorCommandError, print};
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::vendor;
pub use args::TopArgs;
use host::{DisplayUpdate, ObservedVms};
use rows::ObservedVmState;
use screen::TopScreen;
use ui::{TopUiState, UiAction};

/// Interval at which the keyboard is polled.
const KEY_WAIT: Duration = Duration::from_millis(50);

/// Errors of `perfvisor top`.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
    #[error("cannot use the terminal ({0}); use --once")]
    NoScreen(io::Error),
    #[error("the terminal")]
    Terminal(#[source] io::Error),
    #[error("the VM has exited")]
    VmEnded,
}

impl From<CommandOutputError> for TopError {
    fn from(error: CommandOutputError) -> Self {
        Self::Command(error.into())
    }
}

/// Runs the live view. Restores the terminal on return.
///
/// # Errors
/// Returns [`TopError`] if no VM can be observed or the terminal fails.
pub fn top(args: &TopArgs) -> Result<ExitStatus, TopError> {
    let args = &TopArgs {
        event: vendor::resolve_vendor_events(&args.event).map_err(OperatorCommandError::from)?,
        ..args.clone()
    };
    let signals = StopSignals::block().map_err(OperatorCommandError::Signals)?;
    let mut host = ObservedVms::begin(args)?;
    if args.once || !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        host::install_observer_panic_hook();
        return once(args, &mut host, &signals);
    }
    let mut terminal = Terminal::enter(!args.no_mouse)?;
    host::install_observer_panic_hook();
    let ended = watch(&mut terminal.screen, &mut host, args, &signals);
    drop(terminal);
    if ended? == ViewEnd::VmGone {
        print("the VM has exited\n")?;
    }
    Ok(DONE)
}

/// Prints one screen as text after all VMs have reported.
fn once(args: &TopArgs, host: &mut ObservedVms, signals: &StopSignals) -> Result<ExitStatus, TopError> {
    while !host.all_reported() {
        if signals.take().is_some() {
            return Ok(DONE);
        }
        if let Some(DisplayUpdate::Ended) = host.news(KEY_WAIT)? {
            return Err(TopError::VmEnded);
        }
    }
    let screen = screen_of(args, host);
    print(&screen.text())?;
    let mut status = DONE;
    for vm in &screen.vms {
        match &vm.state {
            ObservedVmState::Failed(why) => log::warn!("{}: {why}", vm.label),
            ObservedVmState::Ended => log::warn!("{}: the VM has exited", vm.label),
            ObservedVmState::Waiting | ObservedVmState::Shown(_) => continue,
        }
        status = ExitStatus::CheckFailed;
    }
    Ok(status)
}

fn screen_of(args: &TopArgs, host: &ObservedVms) -> TopScreen {
    TopScreen {
        event: args.event.clone(),
        frequency_hz: args.frequency,
        all_vms: args.all,
        vms: host.vms(),
    }
}

/// Reason the live view ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ViewEnd {
    Asked,
    VmGone,
}

/// The terminal in its alternate screen, restored on drop. After a panic, ratatui's hook restores
/// the terminal before the message is printed.
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
            // Ignore the error if the terminal has been closed.
            let _ = execute!(io::stdout(), DisableMouseCapture);
        }
        ratatui::restore();
    }
}

fn watch(
    terminal: &mut DefaultTerminal,
    host: &mut ObservedVms,
    args: &TopArgs,
    signals: &StopSignals,
) -> Result<ViewEnd, TopError> {
    let mut ui = TopUiState::new(args.all);
    let mut screen = screen_of(args, host);
    let mut changed = true;
    loop {
        if std::mem::take(&mut changed) {
            terminal
                .draw(|frame| screen.draw(frame, &mut ui))
                .map_err(TopError::Terminal)?;
        }
        if signals.take().is_some() {
            return Ok(ViewEnd::Asked);
        }
        let mut news = host.refresh_vms();
        let began = Instant::now();
        // Handle all pending events within the time limit.
        while let Some(came) = host.news(Duration::ZERO)? {
            match came {
                DisplayUpdate::Ended => return Ok(ViewEnd::VmGone),
                DisplayUpdate::Changed => news = true,
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
                    UiAction::Quit => return Ok(ViewEnd::Asked),
                    UiAction::Reset => host.clear_samples(),
                    UiAction::Draw => {}
                },
                Event::Mouse(mouse) => {
                    changed |= ui.mouse(mouse);
                    continue;
                }
                _ => {}
            }
            // A resize also requires a redraw.
            changed = true;
        }
    }
}
