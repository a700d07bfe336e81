//! Formats the call chains of a report row as a tree, like `perf report --stdio --call-graph`.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::rc::Rc;

use super::symbolize::Symbolizer;
use super::{ProfileSample, frames};

/// Maximum depth of a tree, which is the default of perf. A recording may contain longer chains.
const MAX_DEPTH: usize = 127;
/// Indentation of the lines of a tree below its report row.
const INDENT: &str = "            ";

/// Direction in which a call graph is printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum CallGraphOrder {
    /// From the sampled function to its callers.
    #[default]
    Callee,
    /// From the outermost caller to the sampled function.
    Caller,
}

/// Options for the call graphs of a report.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallGraphOptions {
    /// Direction in which the call graph is printed.
    pub order: CallGraphOrder,
    /// Minimum share of a branch, in percent of the event's total period.
    pub min_percent: f64,
}

impl CallGraphOptions {
    /// Default minimum share of a branch, in percent, as in perf.
    pub const MIN_PERCENT: f64 = 0.5;
}

impl Default for CallGraphOptions {
    fn default() -> Self {
        Self {
            order: CallGraphOrder::default(),
            min_percent: Self::MIN_PERCENT,
        }
    }
}

/// A function at one position of a call tree.
struct CallNode {
    name: Rc<str>,
    /// Sum of the periods of the samples whose call chains pass through this node.
    period: u64,
    children: Vec<usize>,
}

/// Functions of the call chains of a set of samples, as a tree.
pub(super) struct CallTree {
    nodes: Vec<CallNode>,
    by_name: HashMap<(usize, Rc<str>), usize>,
}

impl CallTree {
    pub(super) fn new() -> Self {
        let root = CallNode {
            name: "".into(),
            period: 0,
            children: Vec::new(),
        };
        Self {
            nodes: vec![root],
            by_name: HashMap::new(),
        }
    }

    /// Adds the call chain of `sample` to the tree.
    pub(super) fn add(
        &mut self,
        sample: &ProfileSample<'_>,
        symbols: &mut Symbolizer<'_>,
        order: CallGraphOrder,
    ) {
        let mut names: Vec<Rc<str>> = frames(sample)
            .map(|frame| symbols.name(frame, sample.pid).name.as_str().into())
            .collect();
        if order == CallGraphOrder::Caller {
            names.reverse();
        }
        let mut at = 0;
        self.nodes[at].period = self.nodes[at].period.saturating_add(sample.period);
        for name in names.into_iter().take(MAX_DEPTH) {
            let next = self.nodes.len();
            let child = *self.by_name.entry((at, name.clone())).or_insert(next);
            if child == next {
                self.nodes[at].children.push(child);
                self.nodes.push(CallNode {
                    name,
                    period: 0,
                    children: Vec::new(),
                });
            }
            at = child;
            self.nodes[at].period = self.nodes[at].period.saturating_add(sample.period);
        }
    }

    /// Appends the tree as text to `out`. `total` is the sum of the periods of the event's samples.
    pub(super) fn write(&self, total: u64, min_percent: f64, out: &mut String) {
        let tree = ShownTree {
            tree: self,
            total,
            min_percent,
        };
        let Some(first) = tree.children(0).first().copied() else {
            return;
        };
        // Writing to a String cannot fail.
        if self.nodes[first].period == self.nodes[0].period {
            let _ = writeln!(out, "{INDENT}|\n{INDENT}---{}", self.nodes[first].name);
            tree.write_callers(first, &format!("{INDENT}   "), out);
        } else {
            tree.write_callers(0, INDENT, out);
        }
        out.push('\n');
    }
}

/// Call tree without the branches whose share is below the minimum.
struct ShownTree<'t> {
    tree: &'t CallTree,
    total: u64,
    min_percent: f64,
}

impl ShownTree<'_> {
    fn percent(&self, node: usize) -> f64 {
        match self.total {
            0 => 0.0,
            total => 100.0 * self.tree.nodes[node].period as f64 / total as f64,
        }
    }

    /// Returns the displayed children of a node, the largest first.
    fn children(&self, node: usize) -> Vec<usize> {
        let nodes = &self.tree.nodes;
        let mut shown = nodes[node].children.clone();
        shown.retain(|child| self.percent(*child) >= self.min_percent);
        shown.sort_by(|a, b| {
            let by_period = nodes[*b].period.cmp(&nodes[*a].period);
            by_period.then_with(|| nodes[*a].name.cmp(&nodes[*b].name))
        });
        shown
    }

    fn write_callers(&self, mut node: usize, prefix: &str, out: &mut String) {
        let nodes = &self.tree.nodes;
        let mut shown = self.children(node);
        // A single child with all samples of its parent continues its branch.
        while let [only] = shown[..]
            && nodes[only].period == nodes[node].period
        {
            let _ = writeln!(out, "{prefix}{}", nodes[only].name);
            node = only;
            shown = self.children(node);
        }
        let last = shown.last().copied();
        for child in shown {
            let (bar, name) = (if Some(child) == last { ' ' } else { '|' }, &nodes[child].name);
            let share = format!("--{:.2}%--", self.percent(child));
            let _ = writeln!(out, "{prefix}|\n{prefix}{bar}{share}{name}");
            let indent = format!("{prefix}{bar}{:1$}", "", share.len());
            self.write_callers(child, &indent, out);
        }
    }
}
