/*
 * A plugin for QEMU before 8.1, which may keep a translation of code that another processor changed meanwhile: it reads the
 * code, translates, and only then locks the page (docs/guide/lab.md).
 *
 * Linux patches itself through a breakpoint: int3 over the first byte, the rest, then the first byte. A processor that
 * keeps the translation of the int3 takes it for ever, because the kernel finds no int3 there and goes back to it. So before the
 * translation of an int3 is executed, memory is looked at, and if there is none any more all translations are dropped. This
 * execution still takes the breakpoint: Linux 6.1 tries again, 6.12 finds a breakpoint that nobody set, and panics.
 *
 * The interface is QEMU's documented one (docs/devel/tcg-plugins, API version 1); no header of it is packaged.
 */
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *tb);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *tb, size_t index);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *insn);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *insn);
/* Where the instruction is in QEMU's own memory; NULL if not in RAM. */
void *qemu_plugin_insn_haddr(const struct qemu_plugin_insn *insn);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t id,
		void (*translated)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb));
/* Calls before each execution of the block, with the processor's index. No registers are read: flags 0. */
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *tb,
		void (*executed)(unsigned int vcpu_index, void *data), int flags, void *data);
/* Drops all translations and callbacks, then calls. */
void qemu_plugin_reset(qemu_plugin_id_t id, void (*reset)(qemu_plugin_id_t id));

#define EXPORT __attribute__((visibility("default")))

EXPORT int qemu_plugin_version = 1;

static const uint8_t INT3 = 0xcc;

static qemu_plugin_id_t plugin;
static atomic_bool dropping;

static void start(qemu_plugin_id_t id);

static void executed(unsigned int vcpu_index, void *code)
{
	if (*(const volatile uint8_t *)code == INT3 || atomic_exchange(&dropping, true))
		return;
	fprintf(stderr, "stale-code: CPU %u executes a breakpoint that is gone: starting afresh\n", vcpu_index);
	qemu_plugin_reset(plugin, start);
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	size_t n = qemu_plugin_tb_n_insns(tb);
	/* An int3 ends a block. */
	const struct qemu_plugin_insn *last = n ? qemu_plugin_tb_get_insn(tb, n - 1) : NULL;
	void *code;

	(void)id;
	if (!last || qemu_plugin_insn_size(last) != 1 || *(const uint8_t *)qemu_plugin_insn_data(last) != INT3)
		return;
	code = qemu_plugin_insn_haddr(last);
	if (code)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, executed, 0, code);
}

/* After a drop nothing is registered any more. */
static void start(qemu_plugin_id_t id)
{
	atomic_store(&dropping, false);
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc, char **argv)
{
	(void)info;
	(void)argc;
	(void)argv;
	plugin = id;
	start(id);
	return 0;
}
