//! A table of `perfvisor top` with sorting and search, as text and on a terminal.

use std::cmp::Ordering;
use std::fmt::Write as _;

use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table};

/// The type of a column, which determines the sort order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TopColumnKind {
    /// Text, in alphabetical order.
    Text,
    /// Identifying numbers, in ascending order.
    Id,
    /// Quantities, in descending order.
    Count,
}

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub struct TopTableColumn {
    /// Title of the column.
    pub title: &'static str,
    /// Width in characters; 0 for the remaining width.
    pub width: u16,
    /// Type of the column's values.
    pub kind: TopColumnKind,
}

/// A cell with its text, and its sort key if it is a number.
#[derive(Clone, Debug)]
pub struct TopCellValue {
    text: String,
    number: Option<f64>,
}

impl TopCellValue {
    /// Creates a text cell.
    pub fn text(text: impl Into<String>) -> Self {
        let text = text.into();
        Self { text, number: None }
    }

    /// Creates a numeric cell that is displayed as `text`.
    pub fn number(number: f64, text: impl Into<String>) -> Self {
        let (number, text) = (Some(number), text.into());
        Self { text, number }
    }
}

/// The VM and process that a row belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TopRowOwner {
    /// Label of the VM.
    pub vm: String,
    /// Process ID in the guest.
    pub pid: Option<u32>,
}

/// A row of a table.
#[derive(Clone, Debug)]
pub struct TopTableRow {
    /// Cells, one per column.
    pub cells: Vec<TopCellValue>,
    /// Style of the row on a terminal.
    pub style: Style,
    /// VM and process of the row.
    pub owner: TopRowOwner,
}

impl TopTableRow {
    /// Creates a row in the default style that belongs to no VM.
    pub fn new(cells: Vec<TopCellValue>) -> Self {
        Self {
            cells,
            style: Style::new(),
            owner: TopRowOwner::default(),
        }
    }

    /// Creates a row in the default style that belongs to the VM `label`.
    pub fn of_vm(label: &str, cells: Vec<TopCellValue>) -> Self {
        Self {
            owner: TopRowOwner {
                vm: label.to_owned(),
                pid: None,
            },
            ..Self::new(cells)
        }
    }
}

/// A table of columns and rows.
#[derive(Clone, Debug)]
pub struct TopSortableTable {
    /// Columns of the table.
    pub columns: Vec<TopTableColumn>,
    /// Rows of the table.
    pub rows: Vec<TopTableRow>,
}

impl TopSortableTable {
    /// Keeps only the rows that contain `text` in any cell, ignoring case.
    pub fn search(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        let text = text.to_lowercase();
        let has = |row: &TopTableRow| {
            row.cells
                .iter()
                .any(|cell| cell.text.to_lowercase().contains(&text))
        };
        self.rows.retain(has);
    }

    /// Sorts the rows by a column, if the column exists. The sort is stable.
    pub fn sort(&mut self, column: Option<usize>, reverse: bool) {
        if let Some((at, kind)) = column.and_then(|at| Some((at, self.columns.get(at)?.kind))) {
            self.rows.sort_by(|a, b| {
                let (a, b) = (&a.cells[at], &b.cells[at]);
                match (a.number, b.number) {
                    (Some(a), Some(b)) if kind == TopColumnKind::Count => b.total_cmp(&a),
                    (Some(a), Some(b)) => a.total_cmp(&b),
                    // Cells without a number sort last.
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

    /// Writes the table as text. Long cells widen the line and are not truncated.
    pub fn write(&self, out: &mut String) {
        let titles: Vec<&str> = self.columns.iter().map(|column| column.title).collect();
        let rows = self.rows.iter();
        let rows = rows.map(|row| row.cells.iter().map(|cell| cell.text.as_str()).collect());
        for row in std::iter::once(titles).chain(rows) {
            let mut line = String::new();
            for (column, cell) in self.columns.iter().zip(row) {
                let width = usize::from(column.width);
                let _ = match column.kind {
                    TopColumnKind::Text => write!(line, " {cell:<width$}"),
                    TopColumnKind::Id | TopColumnKind::Count => write!(line, " {cell:>width$}"),
                };
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    fn widths(&self) -> Vec<Constraint> {
        let of = |column: &TopTableColumn| match column.width {
            0 => Constraint::Min(10),
            width => Constraint::Length(width),
        };
        self.columns.iter().map(of).collect()
    }

    /// Returns the screen areas of the table's columns within `area`.
    pub fn column_areas(&self, area: Rect) -> Vec<Rect> {
        Layout::horizontal(self.widths()).spacing(1).split(area).to_vec()
    }

    /// Creates the terminal widget for up to `room` rows, starting with row `offset`. Highlights
    /// the row `cursor` and the title of the column `sorted`.
    pub fn table(&self, offset: usize, room: usize, cursor: usize, sorted: Option<usize>) -> Table<'static> {
        let line = |kind: TopColumnKind, text: &str| {
            let line = Line::from(text.to_owned());
            match kind {
                TopColumnKind::Text => line,
                TopColumnKind::Id | TopColumnKind::Count => line.right_aligned(),
            }
        };
        let title = |(at, column): (usize, &TopTableColumn)| {
            let title = line(column.kind, column.title);
            if sorted == Some(at) {
                title.style(Modifier::REVERSED)
            } else {
                title
            }
        };
        let header = Row::new(self.columns.iter().enumerate().map(title));
        let row = |(at, row): (usize, &TopTableRow)| {
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
