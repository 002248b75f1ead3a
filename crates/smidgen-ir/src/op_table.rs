//! The columns of the op table: what stages and devices may ask about any operation.
//!
//! `op_table!` turns the rows in `op.rs` into the enum [`crate::Op`], the list of its names and one method per column.
//! A column that a row leaves out has the safe answer: not cheap, not in place, bound by memory. The columns of a row
//! stand in the order of the macro, so a misspelled one does not compile. What needs real code (shape rule, gradient,
//! workspace, kernels) is not a column: it is a `match` without a wildcard arm in its own file.

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

/// A column of a row, or its default where the row leaves it out.
macro_rules! column {
    (, $default:expr) => {
        $default
    };
    ($value:expr, $default:expr) => {
        $value
    };
}

/// Makes [`crate::Op`] and its columns from one row per operation.
macro_rules! op_table {
    ($(
        $(#[$doc:meta])*
        $variant:ident $( ($attributes:ident: $attributes_type:ty) )?
        $( { $( $field:ident: $field_type:ty ),+ } )? => {
            name: $name:literal,
            $( cheap: $cheap:expr, )?
            $( token_local: $token_local:expr, )?
            $( in_place: $in_place:expr, )?
            $( decodes: $decodes:expr, )?
            $( reads_offloaded: $reads_offloaded:expr, )?
            $( transfer: $transfer:expr, )?
            $( collective: $collective:expr, )?
            $( rounds: $rounds:expr, )?
            $( feed_forward: $feed_forward:expr, )?
            $( head: $head:expr, )?
            $( loss: $loss:expr, )?
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

            /// Whether recomputing the outputs costs less than keeping them: true for some operations that are bound
            /// by memory, never for a matmul or attention.
            pub fn is_cheap(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => column!($( $cheap )?, false), )+
                }
            }

            /// Whether the result for a token depends on that token alone, so that a micro-batch can be processed in tiles
            /// of tokens. Sums over tokens that are added to an update count as local.
            pub fn is_token_local(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $token_local )?, false)
                    } )+
                }
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

            /// Whether the operation only starts a copy between memory spaces or an exchange between ranks; a later
            /// step waits for it.
            pub fn is_transfer(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $transfer )?, false)
                    } )+
                }
            }

            /// Whether all ranks take part.
            pub fn is_collective(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $collective )?, false)
                    } )+
                }
            }

            /// Whether a device may round outputs to fp8 in the kernel that makes them.
            pub fn can_round(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => column!($( $rounds )?, false), )+
                }
            }

            /// Whether the operands are as wide as a feed-forward block, the widest activations of a layer.
            pub fn is_feed_forward(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => {
                        column!($( $feed_forward )?, false)
                    } )+
                }
            }

            /// Whether input 1 is the LM head or some rows of it.
            pub fn reads_head(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => column!($( $head )?, false), )+
                }
            }

            /// Whether the operation belongs to the loss, which works on chunks of rows.
            pub fn is_loss(&self) -> bool {
                match self {
                    $( Op::$variant $( ($attributes) )? $( { $( $field ),+ } )? => column!($( $loss )?, false), )+
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

pub(crate) use {column, op_table};
