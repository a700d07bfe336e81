//! View state of `perfvisor top`, controlled by keyboard and mouse.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers, MouseButton, MouseEvent, MouseEventKind};
use ratatui::layout::{Position, Rect};

use super::sheet::TopRowOwner;

/// Maximum length of the search text, in characters.
const MAX_SEARCH_CHARS: usize = 60;
/// Number of rows by which Page Up and Page Down scroll.
const PAGE: isize = 20;
/// Number of rows by which a step of the mouse wheel scrolls.
const TURN: isize = 3;

/// A table that can be displayed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TopView {
    /// The list of observed VMs, available with `--all`.
    Vms,
    /// Sampled functions.
    #[default]
    Symbols,
    /// Processes of the guests.
    Processes,
    /// vCPUs.
    Vcpus,
    /// VM exits.
    Exits,
    /// Guest counters.
    Counters,
}

impl TopView {
    /// All views in display order.
    pub const ALL: [Self; 6] = [
        Self::Vms,
        Self::Symbols,
        Self::Processes,
        Self::Vcpus,
        Self::Exits,
        Self::Counters,
    ];

    /// Returns the available views for one VM or for all VMs of the host.
    pub fn available(all_vms: bool) -> &'static [Self] {
        if all_vms { &Self::ALL } else { &Self::ALL[1..] }
    }

    /// Returns the title of the view.
    pub fn title(self) -> &'static str {
        match self {
            Self::Vms => "VMs",
            Self::Symbols => "Symbols",
            Self::Processes => "Processes",
            Self::Vcpus => "vCPUs",
            Self::Exits => "Exits",
            Self::Counters => "Guest counters",
        }
    }
}

/// Sort order, cursor and scroll position of a view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TopViewState {
    /// Index of the sort column; `None` for the default order.
    pub sort: Option<usize>,
    /// `true` to reverse the sort order.
    pub reverse: bool,
    /// Index of the selected row.
    pub cursor: usize,
    /// Index of the first visible row.
    pub offset: usize,
}

/// Areas of the screen as last drawn, used to locate mouse events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScreenAreas {
    /// Areas of the view titles.
    pub tabs: Vec<Rect>,
    /// Areas of the column titles.
    pub titles: Vec<Rect>,
    /// Area of the rows.
    pub rows: Rect,
    /// VM and process of each table row, by row index.
    pub row_owners: Vec<TopRowOwner>,
}

/// State of the user interface: selected view, filters, search and cursors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopUiState {
    /// `true` if all VMs of the host are displayed.
    pub all_vms: bool,
    /// The view that is displayed.
    pub view: TopView,
    shown: [TopViewState; TopView::ALL.len()],
    /// Search text.
    pub search: String,
    /// `true` while the search text is being typed.
    pub typing: bool,
    /// `true` while the help text is displayed.
    pub help: bool,
    /// VM whose rows are displayed; `None` for all.
    pub vm: Option<String>,
    /// Process whose functions are displayed; `None` for all.
    pub process: Option<TopRowOwner>,
    /// Screen areas of the last drawing.
    pub areas: ScreenAreas,
}

/// Action that the caller must take after a key or mouse event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UiAction {
    /// Quit the program.
    Quit,
    /// Discard the samples.
    Reset,
    /// Redraw only.
    Draw,
}

impl TopUiState {
    /// Creates the state with the first available view selected and without filters.
    pub fn new(all_vms: bool) -> Self {
        let view = TopView::available(all_vms)[0];
        Self {
            all_vms,
            view,
            ..Self::default()
        }
    }

    /// Returns the sort order, cursor and scroll position of the current view.
    pub fn view_state(&self) -> TopViewState {
        self.shown[self.view as usize]
    }

    /// Returns a mutable reference to the sort order, cursor and scroll position of the current
    /// view.
    pub fn shown_mut(&mut self) -> &mut TopViewState {
        &mut self.shown[self.view as usize]
    }

    /// Selects the available view with index `n`.
    fn show(&mut self, n: usize) {
        if let Some(view) = TopView::available(self.all_vms).get(n) {
            self.view = *view;
        }
    }

    fn next_view(&mut self, forward: bool) {
        let views = TopView::available(self.all_vms);
        let at = views.iter().position(|view| *view == self.view).unwrap_or(0);
        let by = if forward { 1 } else { views.len() - 1 };
        self.show((at + by) % views.len());
    }

    /// Cycles to the next or previous sort column. The default order follows the last column and
    /// precedes the first.
    fn next_sort(&mut self, forward: bool) {
        let columns = self.areas.titles.len();
        let shown = self.shown_mut();
        shown.sort = match (shown.sort, forward) {
            (None, true) => Some(0),
            (None, false) => columns.checked_sub(1),
            (Some(at), true) => Some(at + 1).filter(|at| *at < columns),
            (Some(at), false) => at.checked_sub(1),
        };
        shown.reverse = false;
    }

    fn sort_by(&mut self, column: usize) {
        let shown = self.shown_mut();
        shown.reverse = shown.sort == Some(column) && !shown.reverse;
        shown.sort = Some(column);
    }

    fn scroll(&mut self, by: isize) {
        let last = self.areas.row_owners.len().saturating_sub(1);
        let shown = self.shown_mut();
        shown.cursor = shown.cursor.saturating_add_signed(by).min(last);
    }

    /// Opens the selected row, which shows the functions of a VM or a process.
    fn enter(&mut self) {
        let Some(whose) = self.areas.row_owners.get(self.view_state().cursor).cloned() else {
            return;
        };
        match self.view {
            TopView::Vms => self.vm = Some(whose.vm),
            TopView::Processes => self.process = Some(whose),
            _ => return,
        }
        self.view = TopView::Symbols;
        self.search.clear();
        *self.shown_mut() = TopViewState {
            cursor: 0,
            offset: 0,
            ..self.view_state()
        };
    }

    /// Clears the search text or, if there is none, returns from a process or a VM to the list in
    /// which it was selected. Returns `false` if there is nothing to undo.
    fn back(&mut self) -> bool {
        if !self.search.is_empty() {
            self.search.clear();
        } else if self.process.take().is_some() {
            self.view = TopView::Processes;
        } else if self.vm.take().is_some() {
            self.view = TopView::Vms;
        } else {
            return false;
        }
        true
    }

    /// Handles a key event.
    pub fn key(&mut self, key: KeyEvent) -> UiAction {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control && key.code == KeyCode::Char('c') {
            return UiAction::Quit;
        }
        if std::mem::take(&mut self.help) {
            return UiAction::Draw;
        }
        if self.typing {
            match key.code {
                KeyCode::Enter => self.typing = false,
                KeyCode::Esc => {
                    self.typing = false;
                    self.search.clear();
                }
                KeyCode::Backspace => _ = self.search.pop(),
                KeyCode::Char(c) if !control && self.search.chars().count() < MAX_SEARCH_CHARS => {
                    self.search.push(c)
                }
                _ => {}
            }
            return UiAction::Draw;
        }
        match key.code {
            KeyCode::Char('q') => return UiAction::Quit,
            KeyCode::Esc if !self.back() => return UiAction::Quit,
            KeyCode::Char('z') => return UiAction::Reset,
            KeyCode::Char('h' | '?') => self.help = true,
            KeyCode::Char('/') => {
                self.search.clear();
                self.typing = true;
            }
            KeyCode::Char('s' | '>') => self.next_sort(true),
            KeyCode::Char('S' | '<') => self.next_sort(false),
            KeyCode::Char('r') => self.shown_mut().reverse ^= true,
            KeyCode::Char(digit @ '1'..='9') => self.show(digit as usize - '1' as usize),
            KeyCode::Tab | KeyCode::Right => self.next_view(true),
            KeyCode::BackTab | KeyCode::Left => self.next_view(false),
            KeyCode::Enter => self.enter(),
            KeyCode::Down | KeyCode::Char('j') => self.scroll(1),
            KeyCode::Up | KeyCode::Char('k') => self.scroll(-1),
            KeyCode::PageDown | KeyCode::Char(' ') => self.scroll(PAGE),
            KeyCode::PageUp => self.scroll(-PAGE),
            KeyCode::Home => self.scroll(isize::MIN),
            KeyCode::End => self.scroll(isize::MAX),
            _ => {}
        }
        UiAction::Draw
    }

    /// Handles a mouse event. Returns `false` if the event has no effect.
    pub fn mouse(&mut self, mouse: MouseEvent) -> bool {
        let at = Position::new(mouse.column, mouse.row);
        let under = |places: &[Rect]| places.iter().position(|place| place.contains(at));
        match mouse.kind {
            MouseEventKind::ScrollDown => self.scroll(TURN),
            MouseEventKind::ScrollUp => self.scroll(-TURN),
            MouseEventKind::Down(MouseButton::Left) => {
                if let Some(tab) = under(&self.areas.tabs) {
                    self.show(tab);
                } else if let Some(column) = under(&self.areas.titles) {
                    self.sort_by(column);
                } else if self.areas.rows.contains(at) {
                    let row = self.view_state().offset + usize::from(at.y - self.areas.rows.y);
                    if row >= self.areas.row_owners.len() {
                        return false;
                    }
                    // A click on the selected row opens it.
                    if row == self.view_state().cursor {
                        self.enter();
                    } else {
                        self.shown_mut().cursor = row;
                    }
                }
            }
            _ => return false,
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(ui: &mut TopUiState, code: KeyCode) -> UiAction {
        ui.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    #[test]
    fn keys_match_help_line() {
        let mut ui = TopUiState::new(false);
        ui.areas.titles = vec![Rect::default(); 2];
        assert_eq!(press(&mut ui, KeyCode::Char('q')), UiAction::Quit);
        assert_eq!(press(&mut ui, KeyCode::Esc), UiAction::Quit);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(ui.key(control_c), UiAction::Quit);
        assert_eq!(press(&mut ui, KeyCode::Char('c')), UiAction::Draw);
        assert_eq!(press(&mut ui, KeyCode::Char('z')), UiAction::Reset);
        let before = ui.clone();
        for _ in TopView::available(false) {
            press(&mut ui, KeyCode::Tab);
        }
        assert_eq!(ui, before, "Tab comes round");
        press(&mut ui, KeyCode::Char('h'));
        assert!(ui.help);
        assert_eq!(
            press(&mut ui, KeyCode::Char('q')),
            UiAction::Draw,
            "it closes the keys"
        );
        assert!(!ui.help);
        press(&mut ui, KeyCode::Char('s'));
        assert_eq!(ui.view_state().sort, Some(0));
        press(&mut ui, KeyCode::Char('s'));
        press(&mut ui, KeyCode::Char('s'));
        assert_eq!(
            ui.view_state().sort,
            None,
            "behind the last column comes the usual order"
        );
        press(&mut ui, KeyCode::Char('9'));
        assert_eq!(ui.view, before.view, "there is no such view");
    }

    /// Keys typed after a slash are search text, except for Ctrl-C.
    #[test]
    fn search_can_be_typed_and_cancelled() {
        let mut ui = TopUiState::new(true);
        for key in "/qz".chars() {
            assert_eq!(press(&mut ui, KeyCode::Char(key)), UiAction::Draw);
        }
        press(&mut ui, KeyCode::Backspace);
        assert_eq!((ui.search.as_str(), ui.typing), ("q", true));
        press(&mut ui, KeyCode::Enter);
        assert!(!ui.typing);
        assert_eq!(
            press(&mut ui, KeyCode::Esc),
            UiAction::Draw,
            "it ends the search first"
        );
        assert!(ui.search.is_empty());
        press(&mut ui, KeyCode::Char('/'));
        for _ in 0..1000 {
            press(&mut ui, KeyCode::Char('x'));
        }
        assert_eq!(ui.search.len(), MAX_SEARCH_CHARS);
        let control_c = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(ui.key(control_c), UiAction::Quit);
    }

    #[test]
    fn enter_opens_row_and_escape_returns() {
        let mut ui = TopUiState::new(true);
        let whose = |vm: &str, pid| TopRowOwner { vm: vm.into(), pid };
        ui.areas.row_owners = vec![whose("a", None), whose("b", None)];
        press(&mut ui, KeyCode::Down);
        press(&mut ui, KeyCode::Enter);
        assert_eq!((ui.vm.as_deref(), ui.view), (Some("b"), TopView::Symbols));
        press(&mut ui, KeyCode::Char('3'));
        ui.areas.row_owners = vec![whose("b", Some(7))];
        press(&mut ui, KeyCode::Enter);
        assert_eq!(ui.process, Some(whose("b", Some(7))));
        press(&mut ui, KeyCode::Esc);
        assert_eq!((ui.process.is_none(), ui.view), (true, TopView::Processes));
        press(&mut ui, KeyCode::Esc);
        assert_eq!((ui.vm.is_none(), ui.view), (true, TopView::Vms));
        assert_eq!(press(&mut ui, KeyCode::Esc), UiAction::Quit);
    }

    #[test]
    fn mouse_selects_views_columns_and_rows() {
        let mut ui = TopUiState::new(true);
        ui.areas = ScreenAreas {
            tabs: vec![Rect::new(0, 1, 8, 1), Rect::new(9, 1, 8, 1)],
            titles: vec![Rect::new(0, 2, 10, 1), Rect::new(11, 2, 10, 1)],
            rows: Rect::new(0, 3, 80, 10),
            row_owners: vec![TopRowOwner::default(); 5],
        };
        let click = |ui: &mut TopUiState, column, row| {
            let kind = MouseEventKind::Down(MouseButton::Left);
            ui.mouse(MouseEvent {
                kind,
                column,
                row,
                modifiers: KeyModifiers::NONE,
            })
        };
        assert!(click(&mut ui, 12, 2));
        assert_eq!((ui.view_state().sort, ui.view_state().reverse), (Some(1), false));
        click(&mut ui, 12, 2);
        assert!(ui.view_state().reverse, "again: the other way round");
        click(&mut ui, 5, 6);
        assert_eq!(ui.view_state().cursor, 3);
        assert!(!click(&mut ui, 5, 11), "there is no row");
        click(&mut ui, 10, 1);
        assert_eq!(ui.view, TopView::Symbols);
        let kind = MouseEventKind::ScrollDown;
        let (column, row, modifiers) = (0, 0, KeyModifiers::NONE);
        ui.mouse(MouseEvent {
            kind,
            column,
            row,
            modifiers,
        });
        assert_eq!(ui.view_state().cursor, 3);
    }
}
