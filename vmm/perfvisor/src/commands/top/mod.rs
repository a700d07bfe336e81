//! `perfvisor top`: where a VM's vCPUs spend their time, now.
//!
//! | module | story |
//! |---|---|
//! | `collect` | the connection: samples, counts and the guest's counters, turned into a [`screen::Screen`] |
//! | [`screen`] | what is shown, as text and on a terminal |

mod args;
mod collect;
pub mod screen;

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::{CommandError, DONE, OutputError, Woken, print, wait_until};
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
pub use args::TopArgs;
use collect::{Collector, Took};
use control_api::events::list;
use screen::{Screen, Ui};

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
    list::parse(&args.event).map_err(CommandError::from)?;
    let signals = StopSignals::block().map_err(CommandError::Signals)?;
    let mut collector = Collector::open(args, &signals)?;
    let live = !args.once && std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if !live {
        if wait_until(Instant::now() + args.delay, &signals) == Woken::Signal {
            return Ok(DONE);
        }
        return match collector.take(Instant::now())? {
            Took::Screen(screen) => {
                print(&screen.text())?;
                Ok(DONE)
            }
            Took::Gone => Err(TopError::VmEnded),
        };
    }
    let mut terminal = Terminal::enter()?;
    let ended = watch(&mut terminal.0, &mut collector, args, &signals);
    drop(terminal);
    if ended? == End::VmGone {
        print("the VM ended\n")?;
    }
    Ok(DONE)
}

/// Why the live view ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Asked,
    VmGone,
}

/// The terminal in its own screen; back as it was when dropped, whatever ends the view. A panic restores it
/// too, before its message (ratatui's hook).
struct Terminal(DefaultTerminal);

impl Terminal {
    fn enter() -> Result<Self, TopError> {
        ratatui::try_init().map(Self).map_err(|e| {
            ratatui::restore();
            TopError::NoScreen(e)
        })
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        ratatui::restore();
    }
}

fn watch(
    terminal: &mut DefaultTerminal,
    collector: &mut Collector,
    args: &TopArgs,
    signals: &StopSignals,
) -> Result<End, TopError> {
    let mut ui = Ui::default();
    let mut screen = Screen::waiting(collector.vm(), &args.event);
    let mut next = Instant::now() + args.delay;
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
        let now = Instant::now();
        if now >= next {
            match collector.take(now)? {
                Took::Screen(new) => screen = new,
                Took::Gone => return Ok(End::VmGone),
            }
            changed = true;
            next = now + args.delay;
        } else if event::poll(KEY_WAIT.min(next - now)).map_err(TopError::Terminal)? {
            match event::read().map_err(TopError::Terminal)? {
                Event::Key(key) if key.kind != KeyEventKind::Release => match act(key, &mut ui) {
                    Act::Quit => return Ok(End::Asked),
                    Act::Reset => collector.reset(),
                    Act::Draw => {}
                },
                _ => {}
            }
            // A changed size is drawn too.
            changed = true;
        }
    }
}

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Quit,
    Reset,
    Draw,
}

fn act(key: KeyEvent, ui: &mut Ui) -> Act {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c') if control => return Act::Quit,
        KeyCode::Char('q') | KeyCode::Esc => return Act::Quit,
        KeyCode::Char('z') => return Act::Reset,
        KeyCode::Char('s') => ui.next_sort(),
        KeyCode::Char('r') => ui.reverse = !ui.reverse,
        KeyCode::Char('1') => ui.show(0),
        KeyCode::Char('2') => ui.show(1),
        KeyCode::Char('3') => ui.show(2),
        KeyCode::Tab => ui.next_view(),
        KeyCode::Down | KeyCode::Char('j') => ui.scroll(1),
        KeyCode::Up | KeyCode::Char('k') => ui.scroll(-1),
        KeyCode::PageDown | KeyCode::Char(' ') => ui.scroll(20),
        KeyCode::PageUp => ui.scroll(-20),
        KeyCode::Home => ui.scroll(isize::MIN),
        _ => {}
    }
    Act::Draw
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_do_what_the_last_line_says() {
        let mut ui = Ui::default();
        let press = |code| KeyEvent::new(code, KeyModifiers::NONE);
        assert_eq!(act(press(KeyCode::Char('q')), &mut ui), Act::Quit);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(act(control_c, &mut ui), Act::Quit);
        assert_eq!(act(press(KeyCode::Char('c')), &mut ui), Act::Draw);
        assert_eq!(act(press(KeyCode::Char('z')), &mut ui), Act::Reset);
        let before = ui.clone();
        act(press(KeyCode::Tab), &mut ui);
        act(press(KeyCode::Tab), &mut ui);
        act(press(KeyCode::Tab), &mut ui);
        assert_eq!(ui, before, "there are three views");
        act(press(KeyCode::Char('s')), &mut ui);
        assert_ne!(ui, before);
    }
}
