// SPDX-License-Identifier: GPL-2.0
// Stands in for nvidia-uvm where tests/kernels has no driver: a device whose ioctl has the name and the signature that
// the agent's kprobe relies on. It refuses every command; what the agent reads is in the arguments.
//
// Built without kbuild (module.py says why), so what modpost would add is here too.

#define INCLUDE_VERMAGIC
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/vermagic.h>

static noinline long uvm_unlocked_ioctl_entry(struct file *file, unsigned int command, unsigned long argument)
{
	return -ENOTTY;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = uvm_unlocked_ioctl_entry,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "cotenant-sim-uvm",
	.fops = &operations,
};

int init_module(void)
{
	return misc_register(&device);
}

void cleanup_module(void)
{
	misc_deregister(&device);
}

__visible struct module __this_module __section(".gnu.linkonce.this_module") = {
	.name = KBUILD_MODNAME,
	.init = init_module,
	.exit = cleanup_module,
	.arch = MODULE_ARCH_INIT,
};

MODULE_LICENSE("GPL");
MODULE_INFO(vermagic, VERMAGIC_STRING);
MODULE_INFO(name, KBUILD_MODNAME);

#ifdef VERSIONS
static const struct modversion_info versions[] __used __section("__versions") = { VERSIONS };
#endif
