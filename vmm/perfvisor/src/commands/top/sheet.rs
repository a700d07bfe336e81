//! A table of `perfvisor top`: sorted, searched, as text and on a terminal.

use std::cmp::Ordering;
use std::fmt::Write as _;

use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table};

/// What a column holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Words; A first.
    Text,
    /// Numbers that tell things apart; the least first.
    Id,
    /// How much; the most first.
    Count,
}

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    /// Above it.
    pub title: &'static str,
    /// Its width; 0: what is left.
    pub width: u16,
    /// What it holds.
    pub kind: Kind,
}

/// What a cell shows, and what it is sorted by if that is a number.
#[derive(Clone, Debug)]
pub struct Value {
    text: String,
    number: Option<f64>,
}

impl Value {
    /// Words.
    pub fn text(text: impl Into<String>) -> Self {
        let text = text.into();
        Self { text, number: None }
    }

    /// A number, shown as `text`.
    pub fn number(number: f64, text: impl Into<String>) -> Self {
        let (number, text) = (Some(number), text.into());
        Self { text, number }
    }
}

/// Whose a row is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whose {
    /// The label of the VM.
    pub vm: String,
    /// The guest's process.
    pub pid: Option<u32>,
}

/// A row.
#[derive(Clone, Debug)]
pub struct SheetRow {
    /// One for each column.
    pub cells: Vec<Value>,
    /// How it is drawn.
    pub style: Style,
    /// Whose it is.
    pub whose: Whose,
}

impl SheetRow {
    /// A row of nobody's, drawn as most are.
    pub fn new(cells: Vec<Value>) -> Self {
        Self {
            cells,
            style: Style::new(),
            whose: Whose::default(),
        }
    }

    /// A row of the VM of this label.
    pub fn of_vm(label: &str, cells: Vec<Value>) -> Self {
        Self {
            whose: Whose {
                vm: label.to_owned(),
                pid: None,
            },
            ..Self::new(cells)
        }
    }
}

/// A table.
#[derive(Clone, Debug)]
pub struct Sheet {
    /// Its columns.
    pub columns: Vec<Column>,
    /// Its rows.
    pub rows: Vec<SheetRow>,
}

impl Sheet {
    /// Keeps the rows with `text` in any of their cells, in whatever case.
    pub fn search(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let text = text.to_lowercase();
        let has = |row: &SheetRow| {
            row.cells
                .iter()
                .any(|cell| cell.text.to_lowercase().contains(&text))
        };
        self.rows.retain(has);
    }

    /// Sorts by a column, if there is one of that number; rows that are alike stay in their order.
    pub fn sort(&mut self, column: Option<usize>, reverse: bool) {
        if let Some((at, kind)) = column.and_then(|at| Some((at, self.columns.get(at)?.kind))) {
            self.rows.sort_by(|a, b| {
                let (a, b) = (&a.cells[at], &b.cells[at]);
                match (a.number, b.number) {
                    (Some(a), Some(b)) if kind == Kind::Count => b.total_cmp(&a),
                    (Some(a), Some(b)) => a.total_cmp(&b),
                    // What was not counted comes last.
                    (Some(_), None) => Ordering::Less,
                    (None, Some(_)) => Ordering::Greater,
                    (None, None) => a.text.cmp(&b.text),
                }
            });
        }
        if reverse {
            self.rows.reverse();
        }
    }

    /// As text. Long cells push the line out; nothing is cut.
    pub fn write(&self, out: &mut String) {
        let titles: Vec<&str> = self.columns.iter().map(|column| column.title).collect();
        let rows = self.rows.iter();
        let rows = rows.map(|row| row.cells.iter().map(|cell| cell.text.as_str()).collect());
        for row in std::iter::once(titles).chain(rows) {
            let mut line = String::new();
            for (column, cell) in self.columns.iter().zip(row) {
                let width = usize::from(column.width);
                let _ = match column.kind {
                    Kind::Text => write!(line, " {cell:<width$}"),
                    Kind::Id | Kind::Count => write!(line, " {cell:>width$}"),
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    fn widths(&self) -> Vec<Constraint> {
        let of = |column: &Column| match column.width {
            0 => Constraint::Min(10),
            width => Constraint::Length(width),
        };
        self.columns.iter().map(of).collect()
    }

    /// Where its columns are in `area`.
    pub fn places(&self, area: Rect) -> Vec<Rect> {
        Layout::horizontal(self.widths()).spacing(1).split(area).to_vec()
    }

    /// For a terminal: from row `offset` on, no more than `room`, with a mark at row `cursor` and at the
    /// column that it is sorted by.
    pub fn table(&self, offset: usize, room: usize, cursor: usize, sorted: Option<usize>) -> Table<'static> {
        let line = |kind: Kind, text: &str| {
            let line = Line::from(text.to_owned());
            match kind {
                Kind::Text => line,
                Kind::Id | Kind::Count => line.right_aligned(),
            }
        };
        let title = |(at, column): (usize, &Column)| {
            let title = line(column.kind, column.title);
            if sorted == Some(at) {
                title.style(Modifier::REVERSED)
            } else {
                title
            }
        };
        let header = Row::new(self.columns.iter().enumerate().map(title));
        let row = |(at, row): (usize, &SheetRow)| {
            let cells = row.cells.iter().zip(&self.columns);
            let cells = cells.map(|(cell, column)| line(column.kind, &cell.text));
            let style = if at == cursor {
                row.style.add_modifier(Modifier::REVERSED)
            } else {
                row.style
            };
            Row::new(cells.collect::<Vec<_>>()).style(style)
        };
        let shown = self.rows.iter().enumerate().skip(offset).take(room).map(row);
        Table::new(shown.collect::<Vec<_>>(), self.widths()).header(header.style(Modifier::UNDERLINED))
    }
}
