//! The columns of the op table: what stages and devices may ask about any operation.
//!
//! `op_table!` turns the rows in `op.rs` into the enum [`crate::Op`], the list of its names and one method per column.
//! A column that a row leaves out has the safe answer: not cheap, not in place, no scratch, bound by memory. The columns
//! of a row stand in the order of the macro, so a misspelled one does not compile. A row is in one of three sections:
//! what the backward pass goes through, transfers, and all others. `ops_without_gradient!` and `transfer_ops!` are
//! patterns of sections, for a `match` that has nothing to do there. What needs real code (gradient, kernels) is not a
//! column: it is a `match` without a wildcard arm in its own file.

use crate::rank::Rank;

/// What limits the speed of an operation: which rate of a device profile applies to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoundBy {
    /// Reading and writing its operands.
    Memory,
    /// A matmul with a matrix of weights.
    Matmul,
    /// A matmul that sums over tokens: the gradient of a weight.
    OuterProduct,
    Attention,
}

/// With which neighbours a device may launch an operation in one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batching {
    Alone,
    /// With the same operation on other tensors, if the attributes are equal.
    EqualAttributes,
    /// With the same operation on other tensors, even if the attributes differ.
    AnyAttributes,
}

/// What is true of some operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Property {
    /// Recomputing the outputs costs less than keeping them: so for some operations that are bound by memory, never for a
    /// matmul or attention.
    Cheap,
    /// The result for a token depends on that token alone, so that a micro-batch can be processed in tiles of tokens. Sums
    /// over tokens that are added to an update count as local.
    TokenLocal,
    /// A device may round outputs to fp8 in the kernel that makes them ([`Fusion::Rounding`]).
    Rounds,
    /// The operands are as wide as a feed-forward block, the widest activations of a layer.
    FeedForward,
    /// Input 1 is the LM head or some rows of it.
    ReadsHead,
    /// Belongs to the loss, which works on chunks of rows. What such an operation updates is the loss, first of all.
    Loss,
    /// Treats each row of a trained tensor separately, so that a rank or a piece may work on some rows.
    ByRows,
    /// Updates a parameter and its two moments, in this order, with the gradient that is input 0.
    Optimizer,
    /// The output is a copy of a leaf. Like a leaf, it may have slices.
    CopiesLeaf,
    /// Overwrites what it updates, so that need not hold a value.
    Overwrites,
    /// Computes nothing and waits for a transfer.
    Waits,
    /// Writes the report of a step: its loss, its norm, and whether they are finite.
    Reports,
}

/// What a device may compute in one kernel, although it is two operations or more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fusion {
    /// A matmul, and the sum with the residual.
    Sum,
    /// The gradients of an adapter's B and of what it is multiplied by.
    AdapterGradient,
    /// An operation, and the rounding of its outputs to fp8.
    Rounding,
}

/// Where an operation starts a transfer, instead of computing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// From host memory or disk to the device.
    ToDevice,
    /// From the device to host memory or disk.
    FromDevice,
    /// Between ranks, and all of them take part. With `is_sum`, every rank receives the sum of all.
    Ranks { rank: Rank, is_sum: bool },
    /// No transfer: the host computes while the device continues.
    Host,
}

/// A column of a row, or its default where the row leaves it out.
macro_rules! column {
    (, $default:expr) => {
        $default
    };
    ($value:expr, $default:expr) => {
        $value
    };
}

/// Makes a macro of a pattern that matches all operations of a section.
macro_rules! op_pattern {
    ($name:ident: $(
        $(#[$doc:meta])*
        $variant:ident $( ($($of_tuple:tt)*) )? $( { $($of_struct:tt)* } )? => { $($columns:tt)* }
    )+) => {
        #[doc = "A pattern for the operations of a section of the op table, where `Op` is imported."]
        #[macro_export]
        macro_rules! $name {
            () => { $( Op::$variant { .. } )|+ };
        }
    };
}

/// Makes [`crate::Op`] and its columns from one row per operation.
macro_rules! op_table {
    (
        forward { $($forward:tt)+ }
        others { $($others:tt)+ }
        transfers { $($transfers:tt)+ }
    ) => {
        op_table! { $($forward)+ $($others)+ $($transfers)+ }
        op_pattern! { ops_without_gradient: $($others)+ $($transfers)+ }
        op_pattern! { transfer_ops: $($transfers)+ }
    };
    ($(
        $(#[$doc:meta])*
        $variant:ident $( ($attributes:ident: $attributes_type:ty) )?
        $( { $( $field:ident: $field_type:ty ),+ } )? => {
            name: $name:literal,
            shape: $shape:expr,
            $( scratch: $scratch:expr, )?
            $( is: $properties:expr, )?
            $( in_place: $in_place:expr, )?
            $( decodes: $decodes:expr, )?
            $( reads_offloaded: $reads_offloaded:expr, )?
            $( route: $route:expr, )?
            $( terms: $terms:expr, )?
            $( begins: $begins:expr, )?
            $( ends: $ends:expr, )?
            $( batching: $batching:expr, )?
            $( bound_by: $bound_by:expr, )?
            $( cost: $cost:expr, )?
            $( text: $text:expr, )?
        }
    )+) => {
        #[derive(Clone, Debug, PartialEq)]
        pub enum Op {
            $(
                $(#[$doc])*
                $variant $( ($attributes_type) )? $( { $( $field: $field_type ),+ } )?,
            )+
        }

        #[expect(unused_variables, reason = "few columns of a row depend on its attributes")]
        impl Op {
            /// Every operation by name, in the order of the table.
            pub const NAMES: &'static [&'static str] = &[$( $name ),+];

            /// The name in text forms, messages and lists of examples.
            pub fn name(&self) -> &'static str {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => $name, )+
                }
            }

            /// Output types from the types of inputs and updates, or the operand that does not fit.
            pub fn infer(&self, inputs: &[&Type], updates: &[&Type]) -> Result<Vec<Type>, ShapeError> {
                let rule = Rule { op: self.name(), inputs, updates };
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => rule.apply($shape), )+
                }
            }

            /// Bytes of scratch for one step at the planned extent; 0 = none.
            pub fn workspace_bytes(&self, inputs: &[&Type], extent: &Extent, target: Target) -> usize {
                let step = StepInputs { inputs, extent, target };
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        step.apply(column!($( $scratch )?, |_| 0))
                    } )+
                }
            }

            pub fn has(&self, property: Property) -> bool {
                use Property::*;
                let properties: &[Property] = match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $properties )?, &[])
                    } )+
                };
                properties.contains(&property)
            }

            /// Pairs (output, input) that may share one buffer: each kernel reads an element, or a whole row, before
            /// it writes it. The preferred pair is the first.
            pub fn in_place(&self) -> &'static [(usize, usize)] {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => column!($( $in_place )?, &[]), )+
                }
            }

            /// Whether the operation decodes that input itself, in any storage format. All other inputs must be plain
            /// numbers.
            pub fn decodes(&self, input: usize) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $decodes(input) )?, false)
                    } )+
                }
            }

            /// Whether the operation can read that input from host memory or disk. All other inputs must be on the
            /// device.
            pub fn reads_offloaded(&self, input: usize) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $reads_offloaded(input) )?, false)
                    } )+
                }
            }

            /// Where the operation only starts something, for which a later step waits; `None` if it computes.
            pub fn route(&self) -> Option<Route> {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( Some($route) )?, None)
                    } )+
                }
            }

            /// How many matmuls of an activation and a weight the operation adds up. Their operands come first, in pairs.
            pub fn terms(&self) -> usize {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => column!($( $terms )?, 0), )+
                }
            }

            /// What a device may compute in one kernel from this operation on.
            pub fn begins(&self) -> Option<Fusion> {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( Some($begins) )?, None)
                    } )+
                }
            }

            /// What a device may compute in one kernel up to this operation.
            pub fn ends(&self) -> Option<Fusion> {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( Some($ends) )?, None)
                    } )+
                }
            }

            /// With which neighbours a device may launch the operation in one kernel.
            pub fn batching(&self) -> Batching {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $batching )?, Batching::Alone)
                    } )+
                }
            }

            /// What limits the speed of the operation.
            pub fn bound_by(&self) -> BoundBy {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $bound_by )?, BoundBy::Memory)
                    } )+
                }
            }

            /// Arithmetic and bytes moved; without a formula in the row, every operand once and no arithmetic.
            pub fn cost(&self, operands: &Operands<'_>) -> Cost {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        operands.price(column!($( $cost )?, |step| step.traffic()))
                    } )+
                }
            }

            /// The attributes in text forms; empty if the operation has none or they are all defaults.
            pub fn attributes(&self) -> String {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $text )?, String::new())
                    } )+
                }
            }
        }
    };
}

pub(crate) use {column, op_pattern, op_table};
